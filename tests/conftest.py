"""Settings of the whole suite."""

from hypothesis import settings

# Examples take what the machine leaves them: a limit on each fails where nothing is wrong.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
