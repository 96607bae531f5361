"""The examples of docs/data.md are what the commands print; "..." is for lines that the page leaves out."""

import json
import re

from support.paths import ROOT
from support.projects import rlhf

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def write_faulty(path):
    """Sixty shipped pairs, of which three cannot be read, one has equal answers and one occurs twice."""
    lines = (ROOT / "data" / "support" / "pref_test.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    rows = [{name: json.loads(line)[name] for name in ("prompt", "chosen", "rejected")} for line in lines]
    rows[20] = rows[7]
    rows[11]["rejected"] = rows[11]["chosen"]
    rows[31]["chosen"] = None
    del rows[44]["prompt"]
    texts = [json.dumps(row) for row in rows]
    texts[52] = texts[52][:-2]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def test_the_example_of_a_faulty_file(tmp_path, monkeypatch):
    (shown,) = re.findall(r"^```\n\$ rlhf (data check faulty\.jsonl .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    command, _, wanted = shown.partition("\n")
    monkeypatch.chdir(tmp_path)
    write_faulty(tmp_path / "faulty.jsonl")
    result = rlhf(*command.split(), code=1)
    printed = "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())
    start, *inner, end = wanted.split("...\n")
    assert printed.startswith(start)
    assert printed.endswith(end)
    assert all(part in printed for part in inner)
