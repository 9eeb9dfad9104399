"""`python -m finetune train` and the installed command `finetune train`."""

from finetune.commands import main

if __name__ == "__main__":
    main()
