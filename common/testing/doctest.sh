#!/bin/sh
# Installs doctest where it is missing, if it can. CXX is the compiler that must find it.
echo '#include <doctest/doctest.h>' | ${CXX:-g++} -E -x c++ - >/dev/null 2>&1 && exit
echo "installing doctest"
mkdir -p build
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"
{
  $sudo apt-get install -y doctest-dev || { $sudo apt-get update && $sudo apt-get install -y doctest-dev; }
} >build/doctest.log 2>&1 || {
  echo "doctest is missing: install it with 'apt-get install doctest-dev' (Debian, Ubuntu)" \
    "or from github.com/doctest/doctest" >&2
  exit 1
}
