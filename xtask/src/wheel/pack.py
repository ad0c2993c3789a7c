"""Packs the files below a folder as a wheel: pack.py FOLDER WHEEL DIST_INFO EPOCH."""

import base64
import hashlib
import os
import sys
import time
import zipfile

folder, wheel, info, epoch = sys.argv[1:]
# A zip file has no earlier time.
when = max(time.gmtime(int(epoch))[:6], (1980, 1, 1, 0, 0, 0))
names = sorted(
    os.path.relpath(os.path.join(place, name), folder)
    for place, _, inside in os.walk(folder)
    for name in inside
)
record = f"{info}/RECORD"
rows = []
with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:

    def add(name, content, mode):
        entry = zipfile.ZipInfo(name, when)
        entry.external_attr = (0o100000 | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(entry, content)

    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        add(name, content, 0o755 if name.startswith("pinfold/bin/") else 0o644)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    add(record, "".join(rows) + f"{record},,\n", 0o644)
