#!/bin/sh
# Install packages of Debian: debian_packages.sh PURPOSE PACKAGE...
#
# Says first what it installs, and starts none of it: a package with a service (sshd, slurmd, munge)
# asks /usr/sbin/policy-rc.d whether it may, and for the time of the installation the answer is 101,
# no. A policy that is there already is put back. Never fails.
purpose=$1
shift
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "$purpose needs: $* (installed by itself only as root on Debian)" >&2
    exit 0
fi
policy=${POLICY_RC_D:-/usr/sbin/policy-rc.d}
lock=$policy.nccl-doctor
echo "installing for $purpose, and starting no service of it: $*"

put_back() {
    rm -f "$policy"
    if [ -e "$lock/before" ] || [ -L "$lock/before" ]; then
        mv "$lock/before" "$policy"
    fi
    rm -rf "$lock"
}
# One at a time: a second one would take the policy of the first one for the machine's own. What one
# has left behind that was killed is put back.
until mkdir "$lock" 2>/dev/null; do
    if [ ! -d "$lock" ]; then
        echo "$purpose needs: $* (not installed: $policy cannot be written)" >&2
        exit 0
    fi
    sleep 1
    owner=$(cat "$lock/pid" 2>/dev/null)
    if [ -z "$owner" ] || ! kill -0 "$owner" 2>/dev/null; then
        put_back
    fi
done
echo $$ >"$lock/pid"
trap put_back EXIT
trap 'exit 1' HUP INT TERM
if [ -e "$policy" ] || [ -L "$policy" ]; then
    mv "$policy" "$lock/before"
fi
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends "$@"; } \
    </dev/null >/dev/null; then
    echo "apt-get could not install: $*" >&2
fi
exit 0
