"""Writes one page of a run, or of several beside one another: curves, samples, data, plan, memory, environment.

python report.py outputs/my-run                          its report.html again
python report.py outputs/one outputs/two --output c.html    a comparison
python report.py outputs/my-run --live                   on this machine's loopback address, while the run goes on
"""

import sys
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed(("numpy", "pygal"))

from finetune.callers_process import callers_process
from finetune.cli import Parser
from finetune.errors import PlanError
from finetune.system.terminal import say


def build_parser() -> Parser:
    parser = Parser(prog="report.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "--output", metavar="FILE", help="(default: report.html in the run; comparison.html here for several)"
    )
    parser.add_argument("--live", action="store_true", help="serve the page on 127.0.0.1, with a token in its address")
    parser.number("port", 0, "port of --live; 0: a free one")
    return parser


@callers_process()
def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from finetune.run import page

    folders = [Path(name) for name in args.runs]
    if args.live:
        from finetune.run.live_page import serve

        if args.output:
            raise PlanError(f"--output {args.output}: writes a file, and --live serves the page. Use one of them.")
        return serve(folders, args.port, say)
    if len(folders) == 1:
        default = folders[0] / page.PAGE
    else:
        default = Path("comparison.html")
    file = Path(args.output or default)
    page.write(file, page.page_of(folders, file=file), "--output")
    say(f"report: {file}")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
