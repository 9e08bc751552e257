"""The file system that a path lies on, and whether hosts can share it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nccl_doctor.toolkit.host import Mount

_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|wekafs|panfs|afs|ocfs2|gfs2|orangefs|pvfs2|glusterfs"
    r"|fuse\.(glusterfs|ceph(-fuse)?|juicefs|s3fs|gcsfuse|goofys|geesefs|mount(point)?-s3|rclone"
    r"|blobfuse2?|sshfs|daos|dfuse|mfs|moosefs|lizardfs|alluxio\S*|seaweedfs|quobyte\S*|cvmfs2|hdfs)"
)
_BY_SERVER = re.compile(r"9p|virtiofs|fuse(\..+)?")
"""Types that may come from the machine around a virtual one, or from a network."""
_SERVER = re.compile(r"([\w.-]+):/|//([\w.-]+)/")


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that a path lies on, the last one of its folder; None if none is known."""
    found = None
    for mount in mounts:
        folder = mount.folder.rstrip("/")
        inside = path == folder or path.startswith(f"{folder}/")
        if inside and (found is None or len(folder) >= len(found.folder.rstrip("/"))):
            found = mount
    return found


def is_network(kind: str) -> bool:
    """True if hosts with the same source of this type have the same files."""
    return _NETWORK.fullmatch(kind) is not None


def may_be_shared(kind: str) -> bool:
    """True if files that several hosts see there are more than those of one machine."""
    return is_network(kind) or _BY_SERVER.fullmatch(kind) is not None


def server_of(source: str) -> str:
    """Server in the source of a network file system, `fs1:/export` or `//fs1/share`, or empty."""
    found = _SERVER.match(source)
    return found[1] or found[2] if found else ""
