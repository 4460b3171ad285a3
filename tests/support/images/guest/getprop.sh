#!/system/bin/sh
# Android's getprop over a text: all properties, or the value of one.
properties=/data/shims/getprop
[ -e $properties ] || properties=/system/etc/shims/getprop
if [ $# = 0 ]; then
  cat $properties
  echo "[ro.serialno]: [$(cat /dev/shims/serial)]"
else
  [ "$1" = ro.serialno ] && exec cat /dev/shims/serial
  found=$(grep -m 1 -F "[$1]: [" $properties)
  found=${found#*: [}
  echo "${found%]}"
fi
