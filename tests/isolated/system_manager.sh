#!/bin/bash
# Starts our system unit, hardening and all, under a systemd that is process 1 of namespaces of its own. Needs root and
# util-linux; state, cache, configuration and /run are file systems of the namespace, and go with it.
#     tests/isolated/system_manager.sh .venv/bin/python               the service: start, sandbox, reload, end
#     tests/isolated/system_manager.sh .venv/bin/python hardening     each hardening line: tests/isolated/hardening.py
set -euo pipefail
here=$(readlink -f "$0")
src=$(dirname "$(dirname "$(dirname "$here")")")

outer() {
    python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
    made=; [ -d /etc/whetherman ] || { mkdir /etc/whetherman; made=yes; }
    for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
        if mkdir -p "$tree/whetherman-test" 2>/dev/null; then echo $$ >"$tree/whetherman-test/cgroup.procs" || true; fi
    done
    report=$(mktemp)
    unshare --mount --propagation private --pid --fork --uts --ipc --net --cgroup \
        "$here" inner "$python" "$report" "${2:-checks}" >"$report.log" 2>&1 || true
    cat "$report"
    for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
        echo $$ >"$tree/cgroup.procs"
        find "$tree/whetherman-test" -depth -type d -exec rmdir {} \;
    done 2>/dev/null || true
    rm "$report" "$report.log"
    [ -z "$made" ] || rmdir /etc/whetherman
}

inner() {
    mount -t proc proc /proc
    umount -R /sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    for place in /run /var/lib /var/cache /etc/whetherman; do mount -t tmpfs -o mode=755 tmpfs "$place"; done
    # The units of this machine are not wanted here.
    for wants in /usr/lib/systemd/system/*.wants /etc/systemd/system/*.wants; do mount -t tmpfs tmpfs "$wants"; done
    ip link set lo up
    ip address add 10.9.8.7/32 dev lo             # stands for another machine
    # The program outside of any home, as `service install --system` asks for it.
    mkdir -p /run/wh/base /run/wh/site /run/wh/src /run/systemd/system/whetherman-edge.service.d
    mount --bind "$("$1" -c 'import sys; print(sys.base_prefix)')" /run/wh/base
    mount --bind "$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" /run/wh/site
    mount --bind "$src" /run/wh/src
    /run/wh/base/bin/python3 -m venv --without-pip /run/wh/venv
    printf '/run/wh/site\n/run/wh/src\n' >"$(echo /run/wh/venv/lib/python3*/site-packages)/wh.pth"
    printf 'upstream = "http://127.0.0.1:9"\nengine = "static"\n' >/etc/whetherman/config.toml
    "$1" -c 'import sys; sys.path.insert(0, sys.argv[1]); from whetherman_edge.service import units
print(units.system_service(units.Place(python="/run/wh/venv/bin/python", config=units.SYSTEM_CONFIG)))' "$src" \
        >/run/systemd/system/whetherman-edge.service
    printf '[Service]\nStandardError=append:/run/wh/log\nEnvironment=LD_LIBRARY_PATH=/run/wh/base/lib\n' \
        >/run/systemd/system/whetherman-edge.service.d/here.conf
    printf '[Unit]\nDefaultDependencies=no\n' >/run/systemd/system/nothing.target
    "$here" "$3" "$1" >"$2" 2>&1 &
    exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd --system --unit=nothing.target \
        --log-target=console --show-status=no
}

say() { printf '%-52s %s\n' "$1" "$2"; }
show() { systemctl show -p "$1" --value whetherman-edge; }
inside() { nsenter -t "$(show MainPID)" -m -- "$@" 2>&1 | tail -1; }
as_it() { nsenter -t "$(show MainPID)" -m -S "$(of Uid)" -G "$(of Gid)" -- "$@" 2>&1 | tail -1; }
of() { awk -v name="$1:" '$1 == name {print $2}' "/proc/$(show MainPID)/status"; }
ask() { "$python" -c 'import sys, urllib.request as u, urllib.error as e
try: print(u.urlopen("http://127.0.0.1:8088" + sys.argv[1], b"{}" if "chat" in sys.argv[1] else None, 60).status)
except e.HTTPError as x: print(x.code)' "$1"; }

power_off_at_the_end() { trap 'kill -s RTMIN+14 1' EXIT; }   # at once; process 1 takes no SIGKILL from inside

hardening() {
    power_off_at_the_end
    for place in /home /var/tmp /usr/local/src; do mount -t tmpfs -o mode=1777 tmpfs "$place"; done
    mkdir -m 1777 /run/wh/open
    cp /usr/bin/id /run/wh/suid-id
    chmod 4755 /run/wh/suid-id
    printf '\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3' >/run/wh/int80
    mknod -m 666 /dev/whetherman-probe c 1 3
    (umask 077 && printf 'WHETHERMAN_API_KEY=secret\n' >/etc/whetherman/secrets.env)
    for _ in $(seq 100); do systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded' && break; sleep 0.2; done
    (cd "$src" && "$1" -m tests.isolated.hardening) || true
    rm /dev/whetherman-probe
}

checks() {
    python=$1
    power_off_at_the_end
    "$python" -m http.server -b 0.0.0.0 9 >/dev/null 2>&1 &   # a model server of sorts: 501 to every POST
    for _ in $(seq 100); do systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded' && break; sleep 0.2; done
    say "process 1" "$(systemctl --version | head -1), $(systemctl is-system-running)"
    systemctl start whetherman-edge || { tail -3 /run/wh/log; exit 1; }
    say "started" "$(show ActiveState), $(show StatusText)"
    say "/livez, and a chat that the model server refuses" "$(ask /livez), $(ask /v1/chat/completions)"
    say "DynamicUser: its user" "$(of Uid)"
    say "CapabilityBoundingSet: capabilities left" "$(of CapBnd)"
    say "NoNewPrivileges, SystemCallFilter (2: a filter)" "$(of NoNewPrivs), $(of Seccomp)"
    say "ProtectHome: what it sees of /root" "$(inside ls -A /root)"
    say "ProtectSystem: a file under /usr" "$(inside touch /usr/evil)"
    say "ProtectSystem: its own configuration" "$(as_it touch /etc/whetherman/evil)"
    say "PrivateTmp: what it sees of /tmp" "$(inside ls -A /tmp | wc -l) files"
    say "PrivateDevices: a disk" "$(inside ls /dev/vda)"
    say "ProtectKernelTunables: /proc/sys" "$(inside sh -c 'echo 1 >/proc/sys/vm/swappiness')"
    sleep 2
    say "StateDirectory: the ledger" "$(find -L /var/lib/private/whetherman -name ledger.sqlite3 -printf '%m %U %p\n')"
    first=$(show MainPID)
    echo 'mode = "off"' >>/etc/whetherman/config.toml
    systemctl reload whetherman-edge
    sleep 1
    say "reload" "$(grep -o 'event=reload.*' /run/wh/log | tail -1), same process: $([ "$(show MainPID)" = "$first" ] && echo yes || echo NO)"
    sed -i 's/127.0.0.1:9/10.9.8.7:9/' /etc/whetherman/config.toml
    systemctl reload whetherman-edge
    sleep 1
    say "IPAddressDeny: a model server elsewhere" "$(ask /v1/chat/completions), $(grep -o 'detail=.*' /run/wh/log | tail -1)"
    kill -9 "$first"
    for _ in $(seq 100); do [ "$(show MainPID)" != "$first" ] && [ "$(show ActiveState)" = active ] && break; sleep 0.2; done
    say "after kill -9" "$(show ActiveState), /livez $(ask /livez)"
    systemctl stop whetherman-edge
    say "stopped" "$(show ActiveState), result $(show Result)"
    say "errors in its log" "$(grep -c level=error /run/wh/log || true)"
}

case ${1:-} in
    inner | checks | hardening) "$@" ;;
    *) outer "$@" ;;
esac
