package cli

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// volumeCmd completes a command about the volume that its argument names. The daemon resolves the
// name, once: the calls that follow are for the id.
func volumeCmd(d *daemon, cmd *cobra.Command, run func(*cobra.Command, *adminv1.Volume) error) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = command.Arguments("VOLUME"), completeVolume(d)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		v, err := d.find(cmd, args[0])
		if err != nil {
			return err
		}
		return run(cmd, v)
	}
	return cmd
}

// find returns the volume that VOLUME names. Several of that name are wrong usage, and listed.
func (d *daemon) find(cmd *cobra.Command, name string) (v *adminv1.Volume, err error) {
	err = d.call(cmd.Context(), func(ctx context.Context, c *client) error {
		got, err := c.GetVolume(ctx, &adminv1.GetVolumeRequest{Volume: name})
		v = got.GetVolume()
		if st := status.Convert(err); st.Code() == codes.InvalidArgument {
			return command.WrongUsage(cmd, errors.New(st.Message()))
		}
		return err
	})
	return v, err
}

func named(v *adminv1.Volume) string { return namedBy(v, show.ShortID(v.GetId())) }

func whole(v *adminv1.Volume) string {
	return namedBy(v, v.GetId()) + show.Escape(", device "+v.GetDevice()+", target "+v.GetTargetPath())
}

func namedBy(v *adminv1.Volume, id string) string {
	return show.Escape("volume " + show.VolumeName(v) + show.When(show.Pod(v) != "", " of pod "+show.Pod(v)) + " (" + id + ")")
}

// isBare reports whether VOLUME may be the name of another volume next time: anybody may call a pod or a claim in
// another namespace as they like, also like an id or a PersistentVolume.
func isBare(cmd *cobra.Command, v *adminv1.Volume) bool {
	exact := []string{v.GetId(), v.GetTargetPath()}
	if of := v.GetPodNamespace(); of != "" {
		exact = append(exact, of+"/"+v.GetPodName(), of+"/"+v.GetPvcName())
	}
	return !slices.Contains(exact, cmd.Flags().Arg(0))
}

// selection is which volumes are shown. Of an empty list all are.
type selection struct{ namespaces, pods, drivers, handlers, states []string }

func (s *selection) addFlags(cmd *cobra.Command, d *daemon) {
	flags := cmd.Flags()
	flags.StringSliceVarP(&s.namespaces, "namespace", "n", nil, "only volumes of pods in these namespaces")
	flags.StringSliceVar(&s.pods, "pod", nil, "only volumes of these pods: name, namespace/name or UID")
	flags.StringSliceVar(&s.drivers, "driver", nil, "only volumes of these CSI drivers")
	flags.StringSliceVar(&s.handlers, "handler", nil, "only volumes of these runtime handlers")
	flags.StringSliceVar(&s.states, "state", nil, "only volumes in these states: "+strings.Join(show.StateNames(), ", "))
	command.Complete(cmd, "state", show.StateNames()...)
	completeFlag(cmd, d, "namespace", (*adminv1.Volume).GetPodNamespace)
	completeFlag(cmd, d, "pod", show.Pod)
	completeFlag(cmd, d, "driver", (*adminv1.Volume).GetDriver)
	completeFlag(cmd, d, "handler", (*adminv1.Volume).GetHandler)
}

func (s *selection) matches(v *adminv1.Volume) bool {
	has := func(wanted []string, names ...string) bool {
		is := func(wish string) bool {
			return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, wish) })
		}
		return len(wanted) == 0 || slices.ContainsFunc(wanted, is)
	}
	return has(s.namespaces, v.GetPodNamespace()) && has(s.pods, v.GetPodName(), show.Pod(v), v.GetPodUid()) &&
		has(s.drivers, v.GetDriver()) && has(s.handlers, v.GetHandler()) && has(s.states, show.StateName(v.GetState()))
}

const completionWait = 2 * time.Second

func completeFlag(cmd *cobra.Command, d *daemon, flag string, get func(*adminv1.Volume) string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
		return d.offer(cmd.Context(), begun, func(v *adminv1.Volume) []string { return []string{get(v)} })
	})
}

func completeVolume(d *daemon) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return d.offer(cmd.Context(), begun, func(v *adminv1.Volume) []string { return volumeWords(v, begun) })
	}
}

// volumeWords offers the names of a volume: before anything is typed, that of its pod, or its id if
// the pod is not known.
func volumeWords(v *adminv1.Volume, begun string) []string {
	names := []string{cmp.Or(show.Pod(v), show.ShortID(v.GetId()))}
	if begun != "" {
		names = append(names, v.GetPodNamespace()+"/"+v.GetPvcName(), show.VolumeName(v), show.ShortID(v.GetId()), v.GetTargetPath())
	}
	for i := range names {
		names[i] += "\t" + show.Escape(show.Joined(" ", show.ShortPod(v), show.VolumeName(v), show.StateName(v.GetState())))
	}
	return names
}

// offer returns the words with the prefix that the user typed. If the daemon does not answer,
// there are none: a shell cannot show an error.
func (d *daemon) offer(ctx context.Context, begun string, words func(*adminv1.Volume) []string) ([]string, cobra.ShellCompDirective) {
	var offered []string
	volumes, _ := d.within(completionWait).volumes(ctx)
	for _, v := range volumes {
		offered = append(offered, words(v)...)
	}
	// A shell splits the offers at line feeds and prints them: a word with control
	// characters is left out. One tab separates the word from its description.
	offered = slices.DeleteFunc(offered, func(word string) bool {
		untabbed := strings.Replace(word, "\t", "", 1)
		return word == "" || !strings.HasPrefix(word, begun) || show.Escape(untabbed) != untabbed
	})
	slices.Sort(offered)
	return slices.Compact(offered), cobra.ShellCompDirectiveNoFileComp
}
