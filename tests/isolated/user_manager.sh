#!/bin/bash
# Starts our user unit under a real `systemd --user`, in a mount namespace of its own, on a machine that systemd did not
# boot. Needs root, util-linux and curl; leaves nothing behind.
#     unshare --mount --propagation private tests/isolated/user_manager.sh .venv/bin/python
set -euo pipefail
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
cd "$(dirname "$0")/../.."
home=$(mktemp -d)
mount -t tmpfs tmpfs /run                     # systemd asks for /run/systemd/system before it runs for a user
mkdir -p /run/systemd/system /run/user/0
chmod 700 /run/user/0
export HOME="$home" XDG_RUNTIME_DIR=/run/user/0 DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/0/bus
for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
    if mkdir "$tree/whetherman-test" 2>/dev/null; then echo $$ >"$tree/whetherman-test/cgroup.procs" || true; fi
done
dbus-daemon --session --address="$DBUS_SESSION_BUS_ADDRESS" --nofork --nopidfile 2>/dev/null &
bus=$!
/usr/lib/systemd/systemd --user --log-target=console --log-level=info >"$home/manager.log" 2>&1 </dev/null &
manager=$!
end() {
    [ $? = 0 ] || { echo "ended early; the service said last:"; tail -5 "$home/log"; }
    kill $manager $bus 2>/dev/null
    wait
    for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
        echo $$ >"$tree/cgroup.procs"
        find "$tree/whetherman-test" -depth -type d -exec rmdir {} \;
    done 2>/dev/null
    rm -rf "$home"
}
trap end EXIT
for _ in $(seq 100); do [ "$(systemctl --user is-system-running 2>/dev/null)" = running ] && break; sleep 0.2; done

say() { printf '%-58s %s\n' "$1" "$2"; }
show() { systemctl --user show -p "$1" --value whetherman-edge; }
ask() { "$python" -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[2]+sys.argv[1],timeout=60).status)' "$1" "${2:-http://127.0.0.1:8088}"; }
until_is() { for _ in $(seq 300); do [ "$(show "$1")" = "$2" ] && return; sleep 0.2; done; return 1; }

mkdir -p "$home/.config/systemd/user/whetherman-edge.service.d"
printf '[Service]\nStandardError=append:%s/log\n' "$home" >"$home/.config/systemd/user/whetherman-edge.service.d/here.conf"
systemctl --user set-environment PYTHONPATH="$PWD" WHETHERMAN_UPSTREAM=http://127.0.0.1:8099 WHETHERMAN_ENGINE=static
PYTHONPATH=$PWD "$python" -m whetherman_edge service install --user >"$home/install.log" 2>&1 || cat "$home/install.log"
systemctl --user restart whetherman-edge      # returns when READY=1 has come, not before
say "active after READY=1" "$(show ActiveState), $(show StatusText)"
say "/livez" "$(ask /livez)"
first=$(show MainPID)
config="$home/.config/whetherman/config.toml"
echo 'mode = "off"' >>"$config"
sed -i '/^\[agents\]/d' "$config"
systemctl --user reload whetherman-edge
until_is ActiveState active
say "reload keeps the process" "$([ "$(show MainPID)" = "$first" ] && echo yes || echo NO)"
say "hardening in force" "NoNewPrivs $(awk '/NoNewPrivs/{print $2}' "/proc/$first/status"), Seccomp $(awk '/^Seccomp:/{print $2}' "/proc/$first/status")"
kill -STOP "$first"                            # a loop that hangs sends no heartbeat
for _ in $(seq 500); do [ "$(show MainPID)" != "$first" ] && break; sleep 0.2; done
until_is ActiveState active
say "the watchdog restarted a stopped one" "$([ "$(show MainPID)" != "$first" ] && echo yes || echo NO), /livez $(ask /livez)"
second=$(show MainPID)
kill -9 "$second"
sleep 1
until_is ActiveState active
say "restarted after kill -9" "$([ "$(show MainPID)" != "$second" ] && echo yes || echo NO), /livez $(ask /livez)"
"$python" -c 'import http.server as h, time
class Late(h.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(40)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
h.HTTPServer(("127.0.0.1", 8099), Late).serve_forever()' 2>/dev/null &
late=$!
echo 'drain_timeout_s = 60' >>"$config"        # the unit that is installed says TimeoutStopSec=30s
systemctl --user reload whetherman-edge
until_is ActiveState active
sleep 1
{ ask /late >"$home/late" 2>/dev/null || echo "NO ANSWER" >"$home/late"; } &
asked=$!
sleep 1
systemctl --user stop whetherman-edge
wait $asked || true
kill $late
say "stopped behind a request of 40 s, drain_timeout_s = 60" "$(cat "$home/late"), $(show ActiveState), result $(show Result)"
systemctl --user reset-failed whetherman-edge 2>/dev/null || true   # the starts above count towards StartLimitBurst
"$python" -m http.server -b 127.0.0.1 8088 >/dev/null 2>&1 &
thief=$!
sleep 1
systemctl --user start whetherman-edge 2>/dev/null || true
say "port taken" "exit status $(show ExecMainStatus), then $(show SubState)"
kill $thief
until_is ActiveState active
say "and once it is free" "$(show ActiveState), /livez $(ask /livez)"
systemctl --user stop whetherman-edge
echo 'mode = 7' >>"$config"
systemctl --user start whetherman-edge 2>/dev/null || true
say "a wrong setting is not tried again" "exit status $(show ExecMainStatus), $(show ActiveState)"
sed -i '$d' "$config"
systemctl --user reset-failed whetherman-edge
PYTHONPATH=$PWD "$python" -m whetherman_edge service install --user --on-demand >"$home/install.log" 2>&1 || cat "$home/install.log"
systemctl --user stop whetherman-edge.service 2>/dev/null || true
say "on demand: the socket alone" "$(systemctl --user is-active whetherman-edge.socket), service $(show ActiveState)"
say "on demand: the first request starts it" "$(ask /livez), service $(show ActiveState)"
sed -i '1i host = "::1"\nport = 8090\nlisten = "unix:'"$home"'/edge.sock"' "$config"
PYTHONPATH=$PWD "$python" -m whetherman_edge service install --user --on-demand >"$home/install.log" 2>&1 || cat "$home/install.log"
say "on demand: where the configuration says" "$(systemctl --user show -p Listen --value whetherman-edge.socket | sed "s#$home#~#" | paste -sd ' ')"
say "on demand: mode and owner of its Unix socket" "$(stat -c '%a %U' "$home/edge.sock"), service $(show ActiveState)"
say "on demand: the first request starts it" "$(ask /livez 'http://[::1]:8090'), $(curl -s --unix-socket "$home/edge.sock" -o /dev/null -w '%{http_code}' http://localhost/livez), service $(show ActiveState)"
say "on demand: and nowhere else" "$(ask /livez 2>/dev/null || echo no answer on 127.0.0.1:8088)"
systemctl --user stop whetherman-edge.socket whetherman-edge.service
say "stopped: its Unix socket" "$([ -e "$home/edge.sock" ] && echo STAYS || echo has gone)"
PYTHONPATH=$PWD "$python" -m whetherman_edge service uninstall --user >/dev/null
say "uninstalled" "$(find "$HOME/.config/systemd/user" -type f -name 'whetherman*' | tr '\n' ' ')"
