"""What is in the event files of TensorBoard."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by update of every scalar in TensorBoard's event files."""
    found: dict[str, dict[int, float]] = {}
    for file in folder.glob("events.*"):
        content, position = file.read_bytes(), 0
        while position < len(content):  # length, its checksum, the event, its checksum
            (length,) = struct.unpack_from("<Q", content, position)
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += 12 + length + 4
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found
