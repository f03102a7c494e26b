"""``python -m lifecycle_engine`` is ``lifecycle-engine``."""

from .cli import main

if __name__ == "__main__":
    main()
