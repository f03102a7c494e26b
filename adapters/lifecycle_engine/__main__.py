"""``python -m lifecycle_engine`` is ``lifecycle-engine``."""

import sys


def main() -> None:
    """Run the command, or say which extra it needs."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if "install" not in str(error):
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
