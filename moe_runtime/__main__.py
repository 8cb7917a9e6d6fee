"""`python -m moe_runtime` and the console script: only calls the command line."""

import sys


def main() -> int:
    from moe_runtime.launch.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
