"""Code a corpus or index documents in the tasks of datatrove's local executor: one YAML file says what and how."""

import argparse
from pathlib import Path

import yaml
from datatrove.executor import LocalPipelineExecutor

from mlsm_plugin.cli.datatrove_step import EncodeCorpus, IndexDocuments

STEPS = {"encode": EncodeCorpus, "index": IndexDocuments}


def main() -> None:
    """Run the tasks that are not complete yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="YAML file, such as examples/datatrove/encode.yaml")
    path = parser.parse_args().settings
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    pipeline = []
    for name, step in STEPS.items():
        if name in settings:
            words = [str(word) for word in settings[name]]
            pipeline.append(step(*words))
    if not pipeline:
        parser.error(f"{path} has neither encode nor index")
    # SlurmPipelineExecutor and RayPipelineExecutor take the same pipeline, tasks and logging_dir
    LocalPipelineExecutor(pipeline, **settings["executor"]).run()


if __name__ == "__main__":
    main()
