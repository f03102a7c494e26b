import sys
from pathlib import Path

# The world is shared by the tests here, by mutants in processes of their own
# and by the soak script; none of them is in a package.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "slow: takes minutes; leave it out with -m 'not slow'"
    )
