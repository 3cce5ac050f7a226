"""Lets the tests of this folder, and of those in it, import their helpers `driving` and `talks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
