#!/bin/sh
# Install what the test lab needs, where that is possible. Never fails: without the tools the lab
# tests say themselves what is missing.
PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in ip:iproute2 nft:nftables ethtool:ethtool sshd:openssh-server ssh:openssh-client \
    slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge mpirun:openmpi-bin iptables:iptables zsh:zsh; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0
# shellcheck disable=SC2086 # a list of packages
exec "$(dirname "$0")/debian_packages.sh" "the test lab" $missing
