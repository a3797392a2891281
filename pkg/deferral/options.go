package deferral

import "strings"

// Options lists the mount options of the volume, one an element, and says "ro"
// exactly where the volume is read-only. Runtimes look for an element that is
// exactly "ro".
func (v *Volume) Options() []string {
	options := make([]string, 0, len(v.MountFlags)+1)
	for _, flag := range v.MountFlags {
		for _, option := range SplitOptions(flag) {
			if option != "ro" && (option != "rw" || !v.ReadOnly) {
				options = append(options, option)
			}
		}
	}
	if v.ReadOnly {
		options = append(options, "ro")
	}
	return options
}

// SplitOptions splits a mount flag at commas, but not inside quotes: SELinux
// contexts hold commas there.
func SplitOptions(flag string) []string {
	var options []string
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
