"""How the suite uses two cores: tests that start several processes run one at a time, on one worker,
while the other worker runs the rest (`make test` passes `-n 2 --dist loadgroup`).
"""

import pytest
from hypothesis import settings

# Examples take what the machine leaves them: a limit on each fails where nothing is wrong.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("multiproc"):
            item.add_marker(pytest.mark.xdist_group("multiproc"))
