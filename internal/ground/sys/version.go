package sys

import "runtime/debug"

// Version is the version of this program, as the build stamped it from git.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
