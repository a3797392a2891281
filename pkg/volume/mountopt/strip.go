package mountopt

import "strings"

// forMount8 are options that only mount(8) understands, with the kernel's options
// that they imply. A kernel that is given them refuses the mount.
var forMount8 = map[string][]string{
	"_netdev": nil, "nofail": nil, "auto": nil, "noauto": nil, "comment": nil,
	"silent": nil, "loud": nil,
	"nouser": nil, "nousers": nil, "noowner": nil, "nogroup": nil,
	"user": {"noexec", "nosuid", "nodev"}, "users": {"noexec", "nosuid", "nodev"},
	"owner": {"nosuid", "nodev"}, "group": {"nosuid", "nodev"},
}

// Strip takes out what only mount(8) understands. Where such an option implies
// options of the kernel, these take its place, so that a later one still overrides
// them.
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
