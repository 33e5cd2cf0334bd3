import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import node_config
from torchperf_ros.workers.worker_setup import worker_setup


def setup_of(tmp_path, **stage):
    values = {"adapter": "a:B", "output": "path", "tiers": ["full"], **stage}
    node = node_config({"stages": ["planning"], "cache_dir": str(tmp_path / "cache")}, {"planning": values})
    return worker_setup(node.stages[0], node)


def test_given_a_users_package_when_set_up_then_its_folder_is_one_that_packages_are_taken_from(tmp_path):
    package = tmp_path / "mine" / "full.pt2"
    package.parent.mkdir()
    package.touch()
    assert setup_of(tmp_path, packages=[str(package)])["package_dirs"] == [
        str(tmp_path / "cache"),
        str(package.parent),
    ]


def test_given_a_package_that_others_can_write_when_set_up_then_the_parameter_is_named(tmp_path):
    package = tmp_path / "full.pt2"
    package.touch()
    package.chmod(0o666)
    with pytest.raises(
        ConfigError, match=rf"parameter planning.packages: .*others can write {package} .mode 0666"
    ):
        setup_of(tmp_path, packages=[str(package)])


def test_given_a_cache_that_others_can_write_when_set_up_then_it_is_refused_where_packages_are_taken(
    tmp_path,
):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    with pytest.raises(ConfigError, match=rf"parameter cache_dir: .*`chmod 700 {tmp_path}/cache`"):
        setup_of(tmp_path)
    assert setup_of(tmp_path, engine="eager")["build"][0]["engine"] == "eager"
