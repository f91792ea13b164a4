#!/bin/sh
# Install what the test lab needs (tests/lab); `make test` calls this first. Does nothing when all is there, asks before
# it installs (not with CI set or YES=1), and without root says what will be skipped. Ends with 0 unless an install failed.
#
# Nothing else of the machine is changed: the lab brings its own accounts, subuid and subgid lines and mounts in namespaces
# of its own. The packages' services (sshd on port 22, an LXC bridge) are neither started nor enabled.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

packages=
want() { # PROGRAM PACKAGE, the list of labkit/requirements.py
    command -v "$1" >/dev/null && return
    case " $packages " in *" $2 "*) ;; *) packages="$packages $2" ;; esac
}
want sshd openssh-server
want ssh openssh-client
want ssh-keygen openssh-client
want lxc-start lxc
want lxc-attach lxc
want busybox busybox
want sudo sudo
want unshare util-linux
want nsenter util-linux
want mount mount
packages=${packages# }

say() { printf 'test lab: %s\n' "$*" >&2; }

if [ "$(id -u)" != 0 ]; then
    say "needs root${packages:+ and the Debian packages $packages}; without it the tests in tests/lab are skipped"
    exit 0
fi
[ -n "$packages" ] || exit 0
if ! command -v apt-get >/dev/null; then
    say "needs $packages, and there is no apt-get here; the tests in tests/lab are skipped until they are installed"
    exit 0
fi
if [ -z "${CI:-}" ] && [ "${YES:-}" != 1 ]; then
    if ! [ -t 0 ]; then
        say "needs $packages; set YES=1 to install them without a question; the tests in tests/lab are skipped"
        exit 0
    fi
    printf 'test lab: install the Debian packages %s (services stay off)? [y/N] ' "$packages" >&2
    read -r answer
    case $answer in
        y | Y | yes) ;;
        *) say "not installed; the tests in tests/lab are skipped"; exit 0 ;;
    esac
fi

# invoke-rc.d asks this program whether a package may start its service.
policy=/usr/sbin/policy-rc.d
if ! [ -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of words
apt-get install -y -qq --no-install-recommends $packages >&2

if [ -d /run/systemd/system ]; then
    for package in $packages; do
        case $package in
            openssh-server) systemctl disable --quiet ssh.service || true ;;
            lxc) systemctl disable --quiet lxc.service lxc-net.service lxc-monitord.service || true ;;
        esac
    done
fi
