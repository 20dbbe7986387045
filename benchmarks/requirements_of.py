"""Prints what an installed distribution requires here, less some packages: pip has no such switch."""

import argparse
from importlib.metadata import requires

from packaging.requirements import Requirement

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("distribution")
parser.add_argument("--without", nargs="*", default=[])
args = parser.parse_args()
for line in requires(args.distribution) or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in args.without:
        requirement.marker = None
        print(requirement)
