package command

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

type usageError struct {
	command string
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }

// WrongUsage marks an error as one of the usage of a command. The first mark is kept.
func WrongUsage(cmd *cobra.Command, err error) error {
	if _, marked := errors.AsType[*usageError](err); marked {
		return err
	}
	return &usageError{command: cmd.CommandPath(), err: err}
}

// Arguments requires an argument for each name, and no more. A last one in brackets may be missing.
func Arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names) && !strings.HasPrefix(names[len(args)], "["):
			return WrongUsage(cmd, fmt.Errorf("%s needs a %s", cmd.Name(), strings.Join(names[len(args):], " ")))
		case len(args) > len(names):
			return WrongUsage(cmd, fmt.Errorf("%s does not take %q", cmd.Name(), args[len(names)]))
		}
		return nil
	}
}

// elsewhere are commands that users look for in another program.
var elsewhere = []string{
	"crust-backup blocks", "crust-backup backup", "crust-backup restore",
	"crust-proxy validate", "crust-proxy removable", "crust-proxy removable-nodes", "crust-proxy withdraw",
}

func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	near := cmd.SuggestionsFor(args[0])
	for _, line := range elsewhere {
		program, name, _ := strings.Cut(line, " ")
		other := &cobra.Command{SuggestionsMinimumDistance: 2}
		other.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
		if program != cmd.Root().Name() && len(other.SuggestionsFor(args[0])) > 0 {
			near = append(near, line)
		}
	}
	return WrongUsage(cmd, fmt.Errorf("there is no command %q%s", args[0], show.When(len(near) > 0, "; did you mean "+strings.Join(near, " or ")+"?")))
}

// Explained is an error with advice below it.
type Explained struct {
	Err    error
	Advice string
}

// Explain adds advice to an error.
func Explain(err error, advice string) error { return &Explained{err, advice} }

func (e *Explained) Error() string { return e.Err.Error() + show.When(e.Advice != "", "\n"+e.Advice) }
