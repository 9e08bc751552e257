#!/bin/sh
# Install a browser without windows for the tests of the HTML report, where that is possible and no
# Chromium is there; some 80 MB, about 20 s. Never fails: without it those tests are skipped and say
# so.
for name in chromium chromium-browser google-chrome google-chrome-stable \
    chromium-headless-shell chrome-headless-shell; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "the tests of the HTML report need Chromium (installed by itself only as root on Debian)" >&2
    exit 0
fi
echo "installing for the tests of the HTML report: chromium-headless-shell"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium-headless-shell; } \
    </dev/null >/dev/null; then
    echo "apt-get could not install: chromium-headless-shell" >&2
fi
exit 0
