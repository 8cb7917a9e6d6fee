"""`python -m moe_runtime` and the console script: only calls the command line."""

import sys


def main() -> int:
    try:
        from moe_runtime.launch.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are loaded
        return 130


if __name__ == "__main__":
    sys.exit(main())
