"""Settings of the property tests."""

from hypothesis import settings


def load_profile() -> None:
    """No deadline: it measures how busy the machine is."""
    settings.register_profile("no-deadline", deadline=None)
    settings.load_profile("no-deadline")
