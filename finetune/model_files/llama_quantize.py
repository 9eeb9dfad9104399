"""llama-quantize's command line, IN OUT TYPE, by the library of llama-cpp-python: run as a child process."""

import ctypes
import sys


def main(source: str, target: str, kind: str) -> int:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    return llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
