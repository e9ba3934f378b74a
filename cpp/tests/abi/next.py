"""Write the stream.h of a version yet to come: that of today, with one member more in its table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

EDITS = [
    (r"(#define MLX_TVM_FFI_STREAM_VERSION) \d+", r"\1 99"),
    (r"inline namespace v\d+", "inline namespace v99"),
    (r"(?=\} mtf_stream_table;)", "  int (*added)(mtf_stream* self);\n"),
    (r"(?=\};\n[^{]*references_)", ",\n[](mtf_stream*) { return 0; }"),
]

source, target = map(Path, sys.argv[1:])
text = source.read_text()
for pattern, replacement in EDITS:
    text, count = re.subn(pattern, replacement, text)
    if count != 1:
        sys.exit(f"{source}: expected one {pattern}, got {count}.")
target.parent.mkdir(parents=True, exist_ok=True)
target.write_text(text)
