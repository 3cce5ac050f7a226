"""Lets the tests of this folder, and of those in it, import their helper `driving`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
