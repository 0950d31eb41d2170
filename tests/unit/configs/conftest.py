"""The files over which settings are looked at, once per session."""

import pytest

from tests.support.knob_workshop import Workshop, make_workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("workshop"))
