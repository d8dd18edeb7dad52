"""Writes this machine's pip configuration, environment included, to a file for a build.

Prints the folders of wheels that it names, which the build has to be shown, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

NEEDED = ("index-url", "extra-index-url", "find-links", "trusted-host", "timeout")
LOCAL = "file://"


def main() -> None:
    """The options that say where packages come from, into the file that the argument names."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2].removeprefix("default-")
        if option in NEEDED:
            # An index in a folder may name files anywhere on this machine.
            places = [each for each in ast.literal_eval(value).split() if LOCAL not in each]
            values[option] = " ".join(places)
    # Debian's own pip trusts the certificates that it brings along, not those of the image.
    values["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    lines = ["[global]", *(f"{option} = {value}" for option, value in values.items() if value)]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
    folders = [each for each in values.get("find-links", "").split() if Path(each).is_dir()]
    print(*folders, sep="\n")


if __name__ == "__main__":
    main()
