"""A program that runs llama.cpp's `convert_hf_to_gguf.py` and names the pre-tokenizer of a tokenizer it does not list.

``python gguf_converter.py NAME PATH/convert_hf_to_gguf.py ARGUMENTS...``, where NAME is "" for the converter's choice.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def main() -> None:
    """Run the converter with the arguments of the command line."""
    name, script, *arguments = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120  # as where the script itself is run
    sys.argv = [script, *arguments]
    converter = importlib.import_module("convert_hf_to_gguf")
    try:
        base: Any = importlib.import_module("conversion.base").TextModel
    except ModuleNotFoundError:
        base = converter.TextModel  # Older ones are a single file.
    recognize = base.get_vocab_base_pre

    def recognize_or_name(model: Any, tokenizer: Any) -> Any:
        try:
            return recognize(model, tokenizer)
        except NotImplementedError:  # a tokenizer that the converter does not know
            if not name:
                raise
            return name

    base.get_vocab_base_pre = recognize_or_name
    converter.main()


if __name__ == "__main__":
    main()
