#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs doctest where it is missing, if it can. CXX is the compiler that must find it.
echo '#include <doctest/doctest.h>' | ${CXX:-g++} -E -x c++ - >/dev/null 2>&1 && exit
echo "installing doctest"
mkdir -p build
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"
# A machine without a network is told within a minute: apt would try for many.
apt="$sudo timeout 60 apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=10"
{ $apt install -y doctest-dev || { $apt update && $apt install -y doctest-dev; }; } >build/doctest.log 2>&1 || {
  echo "doctest is missing: install it with 'apt-get install doctest-dev' (Debian, Ubuntu)" \
    "or from github.com/doctest/doctest" \
    "(CXXFLAGS=-IFOLDER, with FOLDER/doctest/doctest.h)" >&2
  exit 1
}
