// Package command is what the command lines of our programs have in common: usage errors,
// exit codes, advice below an error, and completion.
package command

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// The exit codes.
const (
	ExitOK      = 0
	ExitFailure = 1
	ExitUsage   = 2
)

// Report prints the error of a program, and returns the exit code.
func Report(root *cobra.Command, err error) int {
	if err == nil {
		return ExitOK
	}
	root.PrintErrln(root.Name() + ": " + show.EscapeLines(err.Error()))
	if usage, ok := errors.AsType[*usageError](err); ok {
		root.PrintErrf("See '%s --help'.\n", usage.command)
		return ExitUsage
	}
	return ExitFailure
}

// Prepare gives the root of a program, which has its commands already, what all programs have.
func Prepare(root *cobra.Command) {
	root.SilenceErrors, root.SilenceUsage, root.SuggestionsMinimumDistance = true, true, 2
	root.Args = noSuchCommand
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if cmd == root { // an unknown command is the cause of an unknown flag
			err = cmp.Or(noSuchCommand(cmd, cmd.Flags().Args()), err)
		}
		return WrongUsage(cmd, err)
	})
	root.InitDefaultCompletionCmd()
	setCompletionUsageErrors(root)
	setHelpUsageErrors(root)
}

// setHelpUsageErrors makes cobra's help command refuse unknown commands.
func setHelpUsageErrors(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, err := root.Find([]string{"help"})
	if err != nil {
		return // there is none
	}
	help.Args = func(_ *cobra.Command, args []string) error {
		found, rest, err := root.Find(args)
		return cmp.Or(err, noSuchCommand(found, rest))
	}
}

// setCompletionUsageErrors makes cobra's completion command refuse wrong arguments as
// our commands do; by default it prints its help and succeeds.
func setCompletionUsageErrors(root *cobra.Command) {
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		return // there is none
	}
	completion.Args = Arguments("SHELL")
	completion.RunE = func(cmd *cobra.Command, args []string) error {
		return WrongUsage(cmd, fmt.Errorf("there is no completion for %q", args[0]))
	}
	for _, shell := range completion.Commands() {
		shell.Args = Arguments()
	}
}

// Complete completes a flag with fixed words. It cannot fail, because the flag exists.
func Complete(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// UnicodeLocale reports whether the locale uses UTF-8.
func UnicodeLocale(getenv func(string) string) bool {
	value := cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG"))
	return strings.Contains(strings.ToLower(strings.ReplaceAll(value, "-", "")), "utf8")
}
