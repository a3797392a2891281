package runc

import (
	"slices"
	"strings"
)

// invocation is what matters of runc's command line. The line itself is handed on
// as it came.
type invocation struct {
	// command is the sub-command, or "" where there is none.
	command string
	// root and systemdCgroup are global options that a question to runc must carry
	// too; log and logFormat say where containerd looks for the error of a failure.
	root, log, logFormat string
	// bundle is the container's bundle, as given.
	bundle string
}

// The options of runc that take a value, before and after the command. All others
// are switches.
var (
	globalValues  = []string{"log", "log-format", "root", "criu", "rootless"}
	commandValues = []string{
		"bundle", "b", "console-socket", "pid-file", "preserve-fds", "pidfd-socket",
		"image-path", "work-path", "parent-path", "manage-cgroups-mode", "empty-ns", "lsm-profile", "lsm-mount-context",
	}
)

// parseArgs reads runc's command line, without its first word.
func parseArgs(args []string) invocation {
	var in invocation
	global := map[string]*string{"root": &in.root, "log": &in.log, "log-format": &in.logFormat}
	rest := options(args, globalValues, global)
	if len(rest) == 0 {
		return in
	}
	in.command = rest[0]
	local := map[string]*string{"bundle": &in.bundle, "b": &in.bundle}
	// runc takes options after the container's id, too.
	for rest = rest[1:]; len(rest) > 0; {
		if rest = options(rest, commandValues, local); len(rest) > 0 {
			rest = rest[1:]
		}
	}
	return in
}

// options reads options until a word that is none, and gives what is left from
// there on.
func options(args, withValue []string, into map[string]*string) []string {
	for len(args) > 0 {
		word := args[0]
		if word == "--" {
			return args[1:]
		}
		if len(word) < 2 || word[0] != '-' {
			return args
		}
		args = args[1:]
		name, value, given := strings.Cut(strings.TrimLeft(word, "-"), "=")
		if !given && slices.Contains(withValue, name) && len(args) > 0 {
			value, args = args[0], args[1:]
		}
		if at := into[name]; at != nil {
			*at = value
		}
	}
	return nil
}
