"""Makes the helper module of these tests importable, here and in the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
