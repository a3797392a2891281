// Package mountopt knows mount options: how a list of flags is split into options,
// what only mount(8) understands, and which options may reach a kernel.
package mountopt

import "strings"

// Split splits mount flags into options, one an element. A flag may hold several
// options with commas between them, and a comma inside quotes separates nothing:
// SELinux labels hold commas. Whoever asks whether a list holds an option splits it
// first.
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
