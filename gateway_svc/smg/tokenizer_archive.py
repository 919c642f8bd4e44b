"""The tokenizer's files as a zip archive, made from the model bundle. Pure."""

import io
import json
import zipfile

from protos.worker.v1 import worker_pb2

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def tokenizer_archive(bundle: worker_pb2.ModelBundle) -> bytes:
    """The archive; equal for equal bundles."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(sorted(bundle.special_tokens.items())),
    }
    files = {"tokenizer.json": bundle.tokenizer_json, "generation_config.json": bundle.generation_config_json.encode()}
    if bundle.chat_template:
        config["chat_template"] = bundle.chat_template
        files["chat_template.jinja"] = bundle.chat_template.encode()
    files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if content:
                archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), content, zipfile.ZIP_DEFLATED)
    return made.getvalue()
