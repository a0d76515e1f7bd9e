"""experiments/clusters: the scripts run with stubs, the manifests against schemas."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from acco_jax.command import exits
from acco_jax.run.build.validation import validate
from acco_jax.run.config import parsing
from tests import programs

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "experiments" / "clusters"
MANIFESTS = sorted(CLUSTERS.glob("*.yaml"))

pytestmark = pytest.mark.filterwarnings(  # how ml_collections 1.1.0 loads a file
    r"ignore:the load_module\(\) method:DeprecationWarning"
)

# srun: starts two tasks as SLURM does, and returns the highest of their codes.
SRUN = """#!/bin/bash
echo "$@" >>"$STUBS/srun.log"
if [ -e "$STUBS/codes" ]; then
    code=$(head -n 1 "$STUBS/codes")
    sed -i 1d "$STUBS/codes"
    exit "$code"
fi
while [[ $1 == --* ]]; do shift; done
pids=()
for i in 0 1; do
    SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1 \\
        SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0 "$@" &
    pids+=($!)
done
echo "${pids[@]}" >"$STUBS/pids"
highest=0
for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    [ "$code" -gt "$highest" ] && highest=$code
done
exit "$highest"
"""
LOG = """#!/bin/bash
echo "$(basename "$0") $*" >>"$STUBS/log"
"""
CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.devices, c.steps, c.length, c.microbatch_size = 1, 40, 32, 2
    c.microbatches_per_step, c.log_every, c.eval_every = 2, 1, 40
    c.eval_batches, c.checkpoint_every = 2, 40
    c.model.family, c.model.width, c.model.layers, c.model.heads = "llama", 16, 1, 2
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "text_folder", {texts!r}, 0.2
    return c
"""


@pytest.fixture
def cluster(tmp_path):
    """cluster(script, *arguments): the script started, with stubs of its commands."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    texts = {"srun": SRUN, "scontrol": LOG, "gcloud": LOG, "python": python}
    for name, text in texts.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    env = programs.environment() | {
        "PATH": os.pathsep.join((str(stubs), os.environ["PATH"])),
        "STUBS": str(stubs),
        "ACCO_DATA_DIR": str(tmp_path / "data"),
        "SLURM_JOB_ID": job_id(),
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }

    def start(script, *arguments, **variables):
        return subprocess.Popen(
            ["bash", CLUSTERS / script, *arguments],
            cwd=tmp_path, env=env | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def job_id():
    """A job whose number makes a port that is free: JAX takes it from there."""
    while True:
        number = random.randrange(2**12)
        with socket.socket() as free:
            if free.connect_ex(("localhost", number + 65536 - 2**12)):
                return str(number + 2**12)


def logged(tmp_path):
    path = tmp_path / "stubs" / "log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("code", "requeues"),
    [
        (exits.FINISHED, 0),
        (exits.STOPPED, 9),
        (exits.LOST, 2),
        (128 + signal.SIGABRT, 2),
        (exits.REFUSED, 0),
        (exits.DIVERGED, 0),
        (exits.FAILED, 0),
    ],
)
def test_slurm_requeues_what_goes_on(cluster, tmp_path, code, requeues):
    for number in range(1, 10):
        (tmp_path / "stubs" / "codes").write_text(f"{code}\n")
        process = cluster("slurm.sh", "--workdir=a b", MOST_LOSSES="2")
        out, err = process.communicate(timeout=60)
        assert len(logged(tmp_path)) == min(requeues, number), (out, err)
        again = number <= requeues
        assert process.returncode == (0 if again else code), (out, err)
        lost = code == exits.LOST or code > 128
        assert ("lost more than 2 times" in err) == (lost and not again)
    assert len(set(logged(tmp_path))) == (requeues > 0)
    assert all(re.fullmatch(r"scontrol requeue \d+", x) for x in logged(tmp_path))
    (said,) = set((tmp_path / "stubs" / "srun.log").read_text().splitlines())
    assert said.endswith("python -m acco_jax.train --workdir=a b")


@pytest.mark.parametrize("code", [exits.STOPPED, exits.LOST])
def test_slurm_keeps_the_code_if_the_requeue_fails(cluster, tmp_path, code):
    """After a node failure SLURM itself may have requeued the job."""
    (tmp_path / "stubs" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "stubs" / "codes").write_text(f"{code}\n")
    process = cluster("slurm.sh")
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "error:" not in err


def test_slurm_does_not_requeue_what_was_cancelled(cluster, tmp_path):
    (tmp_path / "stubs" / "srun").write_text(
        '#!/bin/bash\ntouch "$STUBS/there"\nsleep 1\nexit 75\n'
    )
    process = cluster("slurm.sh")
    while not (tmp_path / "stubs" / "there").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == exits.STOPPED and not logged(tmp_path)


def test_slurm_asks_for_what_the_text_says():
    text = (CLUSTERS / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "TERM@300" and "requeue" in options
    assert f"STOPPED={exits.STOPPED} LOST={exits.LOST} " in text


@pytest.mark.long
def test_slurm_trains_stops_and_goes_on(cluster, tmp_path):
    texts, workdir = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(f"{i} and {i} is {i + i}, they say. " * 60)
    (tmp_path / "tiny.py").write_text(CONFIG.format(texts=str(texts)))
    flags = ("--config=tiny.py", f"--workdir={workdir}")
    process = cluster("slurm.sh", *flags)
    rows = workdir / "metrics.jsonl"
    while not rows.exists() or not rows.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    for pid in (tmp_path / "stubs" / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)  # as SLURM does ahead of the limit
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "stopped after half-round" in err, err
    assert len(logged(tmp_path)) == 1
    lock = workdir / "lock.json"  # of a node that failed 20 seconds ago
    lock.write_text('{"host": "lost", "pid": 1}')
    os.utime(lock, (time.time() - 20,) * 2)
    process = cluster("slurm.sh", *flags)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and len(logged(tmp_path)) == 1, err
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["workers"] == 2


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def strict(*required, **properties):
    """Return the schema of an object that has these fields only."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def listed(items, **more):
    return {"type": "array", "items": items, **more}


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
JOB = {"type": "object"}  # the schema of batch/v1 judges it
# What the fields of JobSet 0.10 may be: api/jobset/v1alpha2/jobset_types.go and
# pkg/webhooks/jobset_webhook.go of kubernetes-sigs/jobset.
JOBSET = strict(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object", "required": ["name"]},
    spec=strict(
        "replicatedJobs",
        replicatedJobs=listed(
            strict(
                "name", "template",
                name=TEXT, groupName=TEXT, replicas=COUNT, template=JOB,
                dependsOn=listed(strict("name", "status", name=TEXT, status=TEXT)),
            ),
            minItems=1,
        ),
        network=strict(
            enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG
        ),
        failurePolicy=strict(
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules=listed(
                strict(
                    "name", "action",
                    name={"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action={
                        "enum": [
                            "FailJobSet",
                            "RestartJobSet",
                            "RestartJobSetAndIgnoreMaxRestarts",
                        ]
                    },
                    onJobFailureReasons=listed(
                        {
                            "enum": [
                                "BackoffLimitExceeded",
                                "DeadlineExceeded",
                                "FailedIndexes",
                                "MaxFailedIndexesExceeded",
                                "PodFailurePolicy",
                            ]
                        },
                        uniqueItems=True,
                    ),
                    onJobFailureMessagePatterns=listed(TEXT, uniqueItems=True),
                    targetReplicatedJobs=listed(TEXT),
                )
            ),
        ),
        successPolicy=strict(
            "operator",
            operator={"enum": ["All", "Any"]}, targetReplicatedJobs=listed(TEXT),
        ),
        startupPolicy=strict("startupPolicyOrder", startupPolicyOrder=TEXT),
        coordinator=strict(
            "replicatedJob", replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT
        ),
        suspend=FLAG,
        managedBy=TEXT,
        ttlSecondsAfterFinished=COUNT,
    ),
)  # fmt: skip


def jobs_of(document):
    """Return the Jobs that a Job or a JobSet stands for."""
    if document["kind"] != "JobSet":
        return [document] if document["kind"] == "Job" else []
    set_name = document["metadata"]["name"]
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{set_name}-{job['name']}-{i}"},
            **job["template"],
        }
        for job in document["spec"]["replicatedJobs"]
        for i in range(job["replicas"])
    ]


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_are_as_the_schemas_say(path, version):
    for document in documents(path):
        of_kubernetes = [document]
        if document["kind"] == "JobSet":
            jsonschema.validate(document, JOBSET)
            of_kubernetes = jobs_of(document)
        for each in of_kubernetes:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("maxRestarts", "5"),
        ("maxRestart", 5),
        ("restartStrategy", "Blocking"),
        ("rules", [{"name": "no-hyphens", "action": "FailJobSet"}]),
        ("rules", [{"name": "lost", "action": "FailJob"}]),
        ("rules", [{"action": "FailJobSet"}]),
    ],
)
def test_the_schema_of_jobsets_rejects(field, value):
    (document,) = (
        d for d in documents(CLUSTERS / "kubernetes_jobset.yaml")
        if d["kind"] == "JobSet"
    )  # fmt: skip
    document["spec"]["failurePolicy"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, JOBSET)


def actions_of(spec):
    """Return what a Job's podFailurePolicy does with each exit code that it names."""
    return {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_the_parts_of_a_manifest_fit_together(path, monkeypatch):
    by_kind = {document["kind"]: document for document in documents(path)}
    (job,) = (job for document in by_kind.values() for job in jobs_of(document))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    if "JobSet" in by_kind:  # its controller makes the service and names the subdomain
        assert "Service" not in by_kind and "subdomain" not in pod
        assert "network" not in by_kind["JobSet"]["spec"]
        assert spec["backoffLimit"] == 0
    else:
        service = by_kind["Service"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert pod["subdomain"] == service["metadata"]["name"]
        assert actions_of(spec) == {
            exits.REFUSED: "FailJob",
            exits.DIVERGED: "FailJob",
            exits.STOPPED: "Ignore",
        }
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    rules = spec["podFailurePolicy"]["rules"]
    names = {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r}
    assert names == {container["name"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    if "ServiceAccount" in by_kind:
        account = by_kind["ServiceAccount"]["metadata"]["name"]
        assert pod["serviceAccountName"] == account
        assert by_kind["RoleBinding"]["subjects"][0]["name"] == account
        role = by_kind["Role"]["metadata"]["name"]
        assert by_kind["RoleBinding"]["roleRef"]["name"] == role
    monkeypatch.chdir(ROOT)
    *head, config = (x for x in container["command"] if "--workdir" not in x)
    assert head[:3] == ["python", "-m", "acco_jax.train"] and config
    assert not [x for x in container["command"] if re.match("--(restarts|coord)", x)]
    flags = [x for x in container["command"] if x.startswith("--config")]
    validate(parsing.config_of(flags))


@pytest.mark.parametrize(
    ("ended", "action"),
    [
        (exits.REFUSED, "FailJobSet"),
        (exits.DIVERGED, "FailJobSet"),
        (exits.STOPPED, "RestartJobSetAndIgnoreMaxRestarts"),
        ("DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),
        (exits.LOST, "RestartJobSet"),
        (exits.FAILED, "RestartJobSet"),
        (128 + signal.SIGABRT, "RestartJobSet"),
        (128 + signal.SIGKILL, "RestartJobSet"),
    ],
)
def test_a_jobset_restarts_what_goes_on(ended, action):
    """As Kubernetes' and JobSet's controllers match exit codes, rules and messages."""
    (jobset,) = (
        d for d in documents(CLUSTERS / "kubernetes_jobset.yaml")
        if d["kind"] == "JobSet"
    )  # fmt: skip
    (job,) = jobs_of(jobset)
    reason = message = "BackoffLimitExceeded"  # of no rule: backoffLimit is 0
    for i, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {"values": []})["values"]
        conditions = [x["type"] for x in rule.get("onPodConditions", [])]
        if ended in [*codes, *conditions]:
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
            message = f"Pod acco ended with {ended} matching FailJob rule at index {i}"
            break
    found = "RestartJobSet"  # where no rule matches
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        matches = [re.search(x, message) for x in rule["onJobFailureMessagePatterns"]]
        if reason in rule["onJobFailureReasons"] and any(matches):
            found = rule["action"]
            break
    assert found == action
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("setup", "slice"), "git clone -q https://github.com/acco-jax/acco-jax"),
        (
            ("train", "slice", "--config=x.py", "--workdir=/mnt/a b"),
            r"acco_jax.train --config=x.py --workdir=/mnt/a\ b",
        ),
        (("stop", "slice"), "pkill -TERM -f '[m] acco_jax.train'"),
    ],
)
def test_a_slice_is_told_on_all_hosts(cluster, tmp_path, arguments, said):
    process = cluster("tpu_slice.sh", *arguments, ZONE="us-west4-a")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    line = " ".join(logged(tmp_path))
    head = "gcloud compute tpus tpu-vm ssh slice --zone=us-west4-a --worker=all"
    assert line.startswith(head) and said in line


@pytest.mark.parametrize("arguments", [(), ("train",), ("dance", "slice")])
def test_a_slice_is_not_told_what_is_unknown(cluster, tmp_path, arguments):
    process = cluster("tpu_slice.sh", *arguments, ZONE="us-west4-a")
    _, err = process.communicate(timeout=60)
    assert process.returncode and "usage: ZONE=ZONE" in err and not logged(tmp_path)


SSH = """#!/bin/bash
echo "$1 $2" >>"$STUBS/$1.asked"
cd "$STUBS/.." && bash -c "$2"
"""
PYTHON = """#!/bin/bash
echo "$ACCO_TOKEN $*" >"$STUBS/${@: -1}"
[ "${@: -1}" = --process=1 ] && exit 5
exit 0
"""


@pytest.mark.parametrize("given", [None, "a-token-of-some-length"])
def test_hosts_get_one_token_that_is_not_shown(cluster, tmp_path, given):
    stubs = tmp_path / "stubs"
    python = tmp_path / "acco-jax" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file, text in ((stubs / "ssh", SSH), (python, PYTHON)):
        file.write_text(text)
        file.chmod(0o755)
    token = {"ACCO_TOKEN": given} if given else {}
    process = cluster("hosts.sh", "host0 host1", "--workdir=a run", **token)
    assert process.wait(timeout=30) == exits.LOST, process.communicate()
    process.communicate()
    for i in range(2):
        found, *arguments = (stubs / f"--process={i}").read_text().split(maxsplit=1)
        assert found == given if given else re.fullmatch("[0-9a-f]{32}", found)
        assert arguments == [
            "-m acco_jax.train --workdir=a run --coordinator=host0:12355 "
            f"--processes=2 --process={i}\n"
        ]
        assert found not in (stubs / f"host{i}.asked").read_text()
