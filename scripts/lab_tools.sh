#!/bin/sh
# Install what the test lab needs, where that is possible. Never fails: without the tools the lab
# tests say themselves what is missing.
PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in ip:iproute2 nft:nftables ethtool:ethtool sshd:openssh-server ssh:openssh-client \
    slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge mpirun:openmpi-bin; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "the test lab needs:$missing (installed by itself only as root on Debian)" >&2
    exit 0
fi
echo "installing for the test lab:$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of packages
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing; } \
    </dev/null >/dev/null; then
    echo "apt-get could not install:$missing" >&2
fi
exit 0
