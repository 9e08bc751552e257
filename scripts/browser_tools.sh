#!/bin/sh
# Install a browser without windows for the tests of the HTML report, where that is possible and no
# Chromium is there; some 80 MB, about 20 s. Never fails: without it those tests are skipped and say
# so.
for name in chromium chromium-browser google-chrome google-chrome-stable \
    chromium-headless-shell chrome-headless-shell; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
exec "$(dirname "$0")/debian_packages.sh" "the tests of the HTML report" chromium-headless-shell
