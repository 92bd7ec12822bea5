# Install Debian's godot3-server where there is no Godot 3 and one may. Says in one line why not.
skipped="the tests of the 3D map are skipped"
package=godot3-server

if command -v godot3-server >/dev/null || command -v godot3 >/dev/null; then
	exit 0
elif ! command -v apt-get >/dev/null; then
	echo "No Godot 3 here, and no apt-get to install it: $skipped (put $package on PATH)"
	exit 0
elif [ "$(id -u)" = 0 ]; then
	as_root=env
elif sudo -n true 2>/dev/null; then
	as_root="sudo -n env"
else
	echo "No Godot 3 here, and only root may install it: $skipped (sudo apt-get install $package)"
	exit 0
fi

install() {
	$as_root DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $package
}

echo "installing $package"
if ! install >/dev/null 2>&1; then # the list of packages may be missing or old
	$as_root apt-get -qq update
	install >/dev/null || echo "apt-get cannot install $package: $skipped"
fi
exit 0
