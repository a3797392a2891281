// Package mountopt knows mount options: how a list of flags is split into options,
// what only mount(8) understands, and which options may reach a kernel.
package mountopt

import (
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Split splits mount flags into options, one per element. A flag may hold several options,
// separated by commas. A comma in quotes does not separate: SELinux labels hold commas. Split
// a list before you search it for an option.
func Split(flags []string) []string {
	options := make([]string, 0, len(flags)+1)
	for _, flag := range flags {
		options = splitFlag(options, flag)
	}
	return options
}

func splitFlag(options []string, flag string) []string {
	quoted, begin := false, 0
	for i := 0; i <= len(flag); i++ {
		switch {
		case i == len(flag), flag[i] == ',' && !quoted:
			if option := strings.TrimSpace(flag[begin:i]); option != "" {
				options = append(options, option)
			}
			begin = i + 1
		case flag[i] == '"':
			quoted = !quoted
		}
	}
	return options
}

// forMount8 are options that only mount(8) understands, with the kernel's options
// that they imply. A kernel that is given them refuses the mount.
var forMount8 = map[string][]string{
	"_netdev": nil, "nofail": nil, "auto": nil, "noauto": nil, "comment": nil,
	"silent": nil, "loud": nil,
	"nouser": nil, "nousers": nil, "noowner": nil, "nogroup": nil,
	"user": {"noexec", "nosuid", "nodev"}, "users": {"noexec", "nosuid", "nodev"},
	"owner": {"nosuid", "nodev"}, "group": {"nosuid", "nodev"},
}

// Strip removes what only mount(8) understands. Options of the kernel that such an option
// implies take its place, so that a later option still overrides them.
func Strip(options []string) []string {
	kept := make([]string, 0, len(options)+1)
	for _, option := range options {
		if strings.HasPrefix(option, "x-") || strings.HasPrefix(option, "X-") {
			continue
		}
		name, _, _ := strings.Cut(option, "=")
		implied, known := forMount8[name]
		if !known {
			implied = []string{option}
		}
		kept = append(kept, implied...)
	}
	return kept
}

// Options lists the volume's mount options for a kernel, one per element. "ro" is among them
// exactly if the volume is read-only: runtimes search for an element that is exactly "ro".
func Options(v *volume.Volume) []string {
	options := slices.DeleteFunc(Strip(Split(v.MountFlags)), func(option string) bool {
		return option == "ro" || option == "rw" && v.ReadOnly
	})
	if v.ReadOnly {
		options = append(options, "ro")
	}
	return options
}

// NoReplay returns the option with which a kernel mounts a filesystem read-only without a replay
// of its journal or log.
func NoReplay(fsType string) string {
	switch fsType {
	case "xfs":
		return "norecovery"
	case "btrfs":
		return "rescue=nologreplay"
	default:
		return "noload"
	}
}

// SkipsReplay reports whether one of the options keeps the kernel from replaying the journal or
// log of ext4, xfs or btrfs.
func SkipsReplay(options []string) bool {
	return slices.ContainsFunc(options, func(option string) bool {
		return slices.Contains([]string{"noload", "norecovery", "nologreplay", "rescue=nologreplay", "rescue=all"}, option)
	})
}
