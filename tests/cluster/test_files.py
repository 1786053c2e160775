"""The image, the Kubernetes service and the cluster name files, versions and variables that exist."""

import re
import shlex

import pytest
import yaml
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray.autoscaler._private.util import prepare_config, validate_config

from app.config import AuthSettings
from app.haproxy import PROGRAM, SERVE_SETTING
from app.launch import FAST_PATH

DRAINING = {name for name in FAST_PATH if name.endswith("_MIN_DRAINING_PERIOD_S")}
OUR_VARIABLE = re.compile(r"MODESWITCH_[A-Z_]+")


@pytest.fixture
def dockerfile(cluster):
    return (cluster / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture
def service(cluster):
    documents = {item["kind"]: item for item in yaml.safe_load_all((cluster / "rayservice.yaml").read_text())}
    return documents["RayService"]["spec"]


@pytest.fixture
def pod(service):
    return service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]


@pytest.fixture
def ray_cluster(cluster):
    return yaml.safe_load((cluster / "ray_cluster.yaml").read_text())


def pinned(root, package):
    return re.search(rf"^{package}==(\S+)$", (root / "requirements" / "cpu.txt").read_text(), re.MULTILINE)[1]


def test_every_yaml_file_parses(cluster):
    files = [*cluster.rglob("*.yaml"), *cluster.rglob("*.yml")]
    assert len(files) > 5
    assert all(list(yaml.safe_load_all(path.read_text())) for path in files)


def test_variables_of_ours_are_ones_that_the_code_reads(root, cluster):
    read = {name for path in (root / "app").rglob("*.py") for name in OUR_VARIABLE.findall(path.read_text())}
    named = {name for path in cluster.rglob("*") if path.is_file() for name in OUR_VARIABLE.findall(path.read_text())}
    assert named
    assert named <= read


# The image -----------------------------------------------------------------------------------------------------


def test_the_image_installs_and_copies_what_is_there(dockerfile, root):
    requirements = re.findall(r"-r (\S+)", dockerfile)
    assert {"requirements/cpu.txt", "requirements/gpu.txt"} == set(requirements)
    sources = [name for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]]
    configs = re.findall(r"^CMD .*\"(\S+\.yaml)\"\]$", dockerfile, re.MULTILINE)
    assert len(configs) == 2
    assert [name for name in (*requirements, *sources, *configs) if not (root / name).exists()] == []


def test_the_image_resolves_nothing_and_does_not_run_as_root(dockerfile):
    stages = dockerfile.split("\nFROM ")[2:]
    assert len(stages) == 2
    for stage in stages:
        assert all("--no-deps" in line for line in re.findall(r"pip install[^&\n]*", stage))
        assert "\nUSER modeswitch\n" in stage


def test_the_context_holds_what_the_image_copies(dockerfile, cluster):
    kept = {line[1:] for line in (cluster / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    sources = {name for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]}
    assert {name.split("/")[0] for name in sources} == kept


# Kubernetes ----------------------------------------------------------------------------------------------------


def test_kubernetes_serves_the_gpu_serve_config(service, cluster):
    config = yaml.safe_load((cluster / "serve" / "a100.yaml").read_text())
    assert yaml.safe_load(service["serveConfigV2"]) == config


def test_kubernetes_has_the_fast_path_and_the_keys(service, pod, root):
    (container,) = pod["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    plain = {name: entry["value"] for name, entry in variables.items() if "value" in entry}
    expected = {name: value for name, value in FAST_PATH.items() if name not in DRAINING}
    assert plain == {**expected, SERVE_SETTING: f"/usr/local/bin/{PROGRAM}"}
    secret = {name: entry["valueFrom"]["secretKeyRef"] for name, entry in variables.items() if "valueFrom" in entry}
    assert secret.keys() == {AuthSettings().keys_env, "HF_TOKEN"}
    # Without its Secret the pod must not start, or it would be open to everybody.
    assert not any(reference.get("optional") for reference in secret.values())
    assert service["rayClusterConfig"]["rayVersion"] == pinned(root, "ray")


def test_kubernetes_keeps_the_home_that_the_image_names(pod, dockerfile):
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["home"] == re.search(r"MODESWITCH_HOME=(\S+)", dockerfile)[1]
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsUser"] == int(re.search(r"--uid (\d+) modeswitch", dockerfile)[1])


# A machine -----------------------------------------------------------------------------------------------------


def test_ray_up_takes_the_cluster(ray_cluster):
    prepared = prepare_config(ray_cluster)
    validate_config(prepared)
    assert prepared["max_workers"] == 0


def test_the_machine_has_the_fast_path_and_a_token(ray_cluster):
    start = shlex.split(ray_cluster["head_start_ray_commands"][-1])
    variables = dict(word.split("=", 1) for word in start[start.index("env") + 1 :] if re.match(r"\w+=", word))
    haproxy = {SERVE_SETTING: f"$HOME/modeswitch/.venv/bin/{PROGRAM}"}
    assert variables == {**FAST_PATH, **haproxy, AUTH_MODE_ENV_VAR: "token"}


def test_the_machine_installs_what_is_there(ray_cluster, root):
    text = "\n".join(ray_cluster["head_setup_commands"])
    named = re.findall(r"-r (\S+)", text)
    assert named
    assert all((root / name).exists() for name in named)
    assert all("--no-deps" in line for line in text.splitlines() if "pip install" in line)
