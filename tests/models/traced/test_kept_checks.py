"""What the self-check has found is kept from process to process, and only sound entries for the same code count."""

import pytest

from mpar import code_facts, user_cache
from mpar.errors import ConfigError
from mpar.models.traced import _kept_checks, kept_check
from mpar.models.traced._traits import Traits

CONFIG = '{"model_type": "stablelm", "hidden_size": 64}'
FOUND = Traits(permutable=False, first_position=2)


@pytest.fixture
def checks(monkeypatch, tmp_path):
    """The configs that were checked, and the only kept finding: an empty folder of caches, and a check that costs nothing."""
    checked = []

    def check(config_json):
        checked.append(config_json)
        return FOUND

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_kept_checks, "check_traced", check)
    return checked, lambda: next((tmp_path / "mpar" / "checks").iterdir())


def test_a_config_is_checked_once(checks):
    """The order of its keys does not count; another config is checked."""
    checked, _ = checks
    assert [kept_check(CONFIG), kept_check(CONFIG), kept_check('{"hidden_size": 64, "model_type": "stablelm"}')] == [FOUND] * 3
    assert checked == [CONFIG]
    other = CONFIG.replace("64", "32")
    assert kept_check(other) == FOUND
    assert checked == [CONFIG, other]


@pytest.mark.parametrize("name", ["_source_hash", "_torch_build", "_version"])
def test_other_code_checks_again(name, checks, monkeypatch):
    """mpar's source, torch's build, the version of transformers."""
    checked, _ = checks
    kept_check(CONFIG)
    monkeypatch.setattr(code_facts, name, lambda *package: "another")
    kept_check(CONFIG)
    assert len(checked) == 2


def test_a_damaged_entry_is_not_used(checks):
    """Whichever byte is another one, and wherever it ends: the config is checked again, and the entry is written anew."""
    checked, entry = checks
    kept_check(CONFIG)
    sound = entry().read_bytes()
    damaged = [sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :] for at in range(0, len(sound), 7)]
    damaged += [sound[:at] for at in range(0, len(sound), 7)]
    for number, content in enumerate(damaged):
        entry().write_bytes(content)
        assert kept_check(CONFIG) == FOUND
        assert len(checked) == number + 2
    assert entry().read_bytes() == sound


def test_the_entry_of_another_config_is_not_used(checks):
    """Also under the name of this one; and nothing that others may have written."""
    checked, entry = checks
    kept_check(CONFIG)
    name, content = entry().name, entry().read_bytes()
    entry().unlink()
    kept_check(CONFIG.replace("64", "32"))
    entry().rename(entry().with_name(name))
    kept_check(CONFIG)
    assert len(checked) == 3
    assert entry().read_bytes() == content
    entry().chmod(0o666)
    kept_check(CONFIG)
    assert len(checked) == 4


def test_refusals_are_not_kept(checks, monkeypatch):
    """Who installs what was missing is not told the same again."""

    def refuse(config_json):
        raise ConfigError("cannot trace it")

    with monkeypatch.context() as patch:
        patch.setattr(_kept_checks, "check_traced", refuse)
        with pytest.raises(ConfigError, match="cannot trace it"):
            kept_check(CONFIG)
    assert kept_check(CONFIG) == FOUND


def test_without_a_place_to_keep_it_the_model_is_checked(checks, monkeypatch, tmp_path):
    """A user without a folder for caches, and a folder that cannot be written."""
    checked, _ = checks
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [kept_check(CONFIG), kept_check(CONFIG)] == [FOUND] * 2

    def homeless():
        raise ConfigError("no folder")

    monkeypatch.setattr(_kept_checks, "user_cache", homeless)
    assert kept_check(CONFIG) == FOUND
    assert len(checked) == 3
    assert user_cache.user_cache().parent == tmp_path / "file"
