"""How much memory a process needs to load a Hugging Face folder: its own part, or more.

    python benchmarks/loading.py [--bytes=1000000000] [--processes=1,2]

Writes a Llama with random weights in bfloat16, in files of 250 MB, into a temporary
folder, and loads it as `config.init_from` does, in fresh processes of one CPU device
each, which split every array among them (`config.mesh.fsdp`). On CPU devices the arrays
themselves are memory of the process, so that its own part is the least that there can
be.

    own part    bytes of the arrays that a process holds in the end
    peak        largest resident memory while it loaded, less that just before; what of
                the files is mapped at that moment counts
    peak / own  1: nothing else was held at any time
"""

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

WIDTH, HIDDEN, VOCABULARY = 1536, 4096, 32000
FILE_BYTES = 250_000_000


def write(folder, size):
    """Writes a model of about so many bytes."""
    import ml_dtypes

    from acco_jax.models import huggingface, transformer
    from acco_jax.run.weights import folders

    parts = transformer.FAMILIES["llama"]
    parts |= {"width": WIDTH, "heads": 12, "mlp_width": HIDDEN, "max_length": 1024}
    layer = 4 * WIDTH**2 + 3 * WIDTH * HIDDEN
    layers = max(1, round((size / 2 - VOCABULARY * WIDTH) / layer))
    config = transformer.Config(
        **parts, vocab_size=VOCABULARY, layers=layers, param_dtype="bfloat16"
    )
    (folder / "config.json").write_text(json.dumps(huggingface.config_json(config)))
    rng = np.random.default_rng(0)

    def drawn(x):
        numbers = rng.integers(0, 2**15, x.shape, np.uint16)  # positive, all alike
        return (numbers & 0x3FFF).view(ml_dtypes.bfloat16)

    import jax

    params = jax.tree.map(drawn, transformer.shapes_of(config))
    folders.write_weights(folder, huggingface.to_state(config, params), FILE_BYTES)


def status(field):
    """Returns a field of /proc/self/status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(field)).split()[1])


def load(folder, process, processes, port):
    """Loads the folder, and prints what that took as a line of JSON."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    from acco_jax.models import transformer
    from acco_jax.run.build import meshes, models
    from acco_jax.run.trained import trained_runs
    from acco_jax.run.weights import pretrained

    mesh = meshes.data_mesh(jax.devices(), 1, {"fsdp": processes})
    found = pretrained.folder_of(folder)
    config = pretrained.model_config(folder, found.config_json, param_dtype="bfloat16")
    model = transformer.model(config)
    homes = trained_runs.shardings(models.specs(model, model.shapes(), mesh), mesh)
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.local_devices()[0]))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, began = status("VmRSS"), time.perf_counter()
    params = jax.block_until_ready(pretrained.load(config, found, homes))
    seconds = time.perf_counter() - began
    own = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(params)
        for shard in x.addressable_shards
    )
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    peak = status("VmHWM") - before
    print(json.dumps({"total": total, "own": own, "peak": peak, "seconds": seconds}))


def measured(folder, processes):
    """Returns what each of some processes has printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        __file__,
        f"--folder={folder}",
        f"--processes={processes}",
    ]
    started = [
        subprocess.Popen(
            [*command, f"--process={i}", f"--port={port}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    return [json.loads(text.splitlines()[-1]) for text in said]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--folder")  # of the processes that this one starts
    parser.add_argument("--process", type=int)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.folder:
        load(args.folder, args.process, int(args.processes), args.port)
        return
    print("| processes | process | model MB | own part MB | peak MB | peak / own | s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write(pathlib.Path(name), args.bytes)
        for processes in map(int, args.processes.split(",")):
            for i, x in enumerate(measured(name, processes)):
                megabytes = [f"{x[k] / 1e6:.0f}" for k in ("total", "own", "peak")]
                print(
                    f"| {processes} | {i} | {' | '.join(megabytes)} | "
                    f"{x['peak'] / x['own']:.2f} | {x['seconds']:.1f} |"
                )


if __name__ == "__main__":
    main()
