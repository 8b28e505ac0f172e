#!/bin/sh
# Serve starts this as HAProxy for each configuration. It corrects the configuration, as serve_app/system/haproxy.py
# describes, and becomes HAProxy in a session of its own: Ray ends the process group of a manager that died.
set -e
if [ "$1" = stand-in ]; then exec %{haproxy} -db -f %{folder}/%{last}; fi
config=
previous=
for argument in "$@"; do
    if [ "$previous" = -f ]; then config=$argument; fi
    previous=$argument
    shift
    [ "$argument" = -dR ] || set -- "$@" "$argument" # without it, a port is handed over while both listen
done
front=$(cat %{folder}/%{front} 2>/dev/null) || front=
grep -q %{folder} "/proc/$front/cmdline" 2>/dev/null || front=
unmatched=404
grep -q '^ *use_backend ' "$config" || unmatched=503
bind=%{bind}
tls='%{tls}'
stands=yes
if [ -n "$front" ]; then
    case " $* " in *" $front "*) ;; *)
        # A new manager has no routers at first: the HAProxy with the endpoint's port keeps it until then.
        if grep '^ *server ' "$config" | grep -q -v ' backup$'; then set -- "$@" -sf "$front"
        else stands= bind='s#bind .*#bind unix@%{folder}/p.sock mode 600#'; fi
    esac
fi
sed -i -e 's#^\( *bind \).*:%{stats}$#\1unix@%{folder}/s.sock mode 600#' \
    -e 's#^\( *bind \).*:%{metrics}$#\1unix@%{folder}/%{metrics_socket} mode 600#' \
    -e '/^ *option splice-request *$/d' -e '/^ *errorfile /d' \
    -e "s#return status 404 content-type text/plain .*Ping .*#return status $unmatched default-errorfiles#" \
    -e "/^frontend http_frontend\$/,/^ *bind /$bind" \
    -e "/^frontend http_frontend\$/,/^ *bind /s#^\( *bind .*:[0-9]*\)\$#\1$tls#" \
    -e '/^defaults$/r %{folder}/defaults.cfg' -e '/^frontend http_frontend$/r %{folder}/frontend.cfg' "$config"
changed() {
    echo "$1: the template of Ray Serve has changed" >&2
    exit 1
}
if grep -q -E '^ *bind .*:(%{stats}|%{metrics})( |$)' "$config"; then changed "the statistics would be open to all"; fi
if grep -q 'option splice-request' "$config"; then changed "disconnects would go unnoticed"; fi
if grep -q 'return status 404 content-type' "$config"; then changed "what is not known would be answered in text"; fi
[ "$(grep -c '# of serve_app' "$config")" = 2 ] || changed "clients would not be bounded"
[ -z "$stands" ] || [ -z "$tls" ] || grep -q "$tls\$" "$config" || changed "the endpoint would not be encrypted"
if [ -n "$stands" ]; then
    echo $$ >%{folder}/%{front}.new && mv -f %{folder}/%{front}.new %{folder}/%{front} # atomic, for concurrent readers
    # A HAProxy that makes load balancers go elsewhere gets no fallback.
    if grep -q 'force health checks to fail' "$config"; then rm -f %{folder}/%{last}
    else sed -e '/^ *stats socket /d' -e '/server-state/d' "$config" >%{folder}/%{last}; fi
fi
exec setsid %{haproxy} "$@"
