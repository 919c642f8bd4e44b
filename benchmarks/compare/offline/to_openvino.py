"""Converts a checkpoint to OpenVINO's format by optimum-intel: python -m benchmarks.compare.offline.to_openvino FROM TO

Weights are stored in 16 bits; the compute precision is a setting of the pipeline.
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.exporters.openvino.convert import export_tokenizer
from optimum.intel import OVConfig
from transformers import AutoTokenizer


def main(checkpoint: str, folder: str) -> None:
    """Convert model and tokenizer."""
    config = OVConfig(dtype="fp16")
    main_export(checkpoint, folder, task="text-generation-with-past", ov_config=config, convert_tokenizer=False)
    export_tokenizer(AutoTokenizer.from_pretrained(checkpoint), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
