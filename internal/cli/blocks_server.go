package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/blocks"
)

// blockServer is who is asked for blocks: a CSI driver, or the service of a cluster.
type blockServer struct {
	csiSocket                                string
	kubeconfig, kubeContext                  string
	namespace, account, accountIn, forwarded string
}

// ofCluster are the flags that make no sense with a CSI socket.
var ofCluster = []string{"kubeconfig", "context", "namespace", "service-account", "client-namespace", "address"}

func (s *blockServer) flags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&s.csiSocket, "csi-socket", "", "the socket of the CSI driver that has the snapshot")
	flags.StringVar(&s.kubeconfig, "kubeconfig", "", "how to get to the cluster (default: as kubectl)")
	flags.StringVar(&s.kubeContext, "context", "", "the context of the kubeconfig (default: the current one)")
	flags.StringVarP(&s.namespace, "namespace", "n", "", "the snapshot's (default: that of the context)")
	flags.StringVar(&s.account, "service-account", "default", "whose token the service gets")
	flags.StringVar(&s.accountIn, "client-namespace", "", "the service account's (default: that of the snapshot)")
	flags.StringVar(&s.forwarded, "address", "", "HOST:PORT of the service, if it is not to be reached at its own, such as 127.0.0.1:6443")
}

func (s *blockServer) check(cmd *cobra.Command) error {
	for _, name := range ofCluster {
		if s.csiSocket != "" && cmd.Flags().Changed(name) {
			return fmt.Errorf("--%s is for a cluster, and --csi-socket asks a driver", name)
		}
	}
	return nil
}

// question is about which snapshots a server is asked.
type question struct {
	target string
	// base is named as target is, and baseID by CSI's id. Both are empty for allocated blocks.
	base, baseID string
}

func (q question) check() error {
	if q.base != "" && q.baseID != "" {
		return errors.New("--base and --base-id name the same thing")
	}
	return nil
}

// blocksOf does something with the blocks of a snapshot, of which it also gets CSI's id.
type blocksOf func(ctx context.Context, id string, reader *blocks.Reader) error

// with connects, and explains the errors of what is done with the connection.
func (s *blockServer) with(ctx context.Context, of question, do blocksOf) error {
	if s.csiSocket == "" {
		return explainBlocks(ctx, s.withCluster(ctx, of, do))
	}
	conn, err := blocks.DialCSI(s.csiSocket)
	if err != nil {
		return &explained{err, "The driver's pod and its --endpoint show where the socket is on the node."}
	}
	err = do(ctx, of.target, &blocks.Reader{Source: blocks.FromCSI(conn, cmp.Or(of.baseID, of.base), of.target)})
	return errors.Join(explainBlocks(ctx, err), conn.Close())
}

// withCluster goes the way of backup software: the snapshot's driver, its service, a token.
func (s *blockServer) withCluster(ctx context.Context, of question, do blocksOf) error {
	cluster, err := blocks.OpenCluster(s.kubeconfig, s.kubeContext, s.namespace)
	if err != nil {
		return err
	}
	target, err := cluster.Snapshot(ctx, of.target)
	if err != nil {
		return err
	}
	if of.base != "" {
		base, err := cluster.Snapshot(ctx, of.base)
		if err != nil {
			return err
		}
		of.baseID = base.ID
	}
	service, err := cluster.Service(ctx, target.Driver)
	if err != nil {
		return err
	}
	conn, err := service.Dial(s.forwarded)
	if err != nil {
		return err
	}
	tokens := func(ctx context.Context) (string, error) {
		return cluster.Token(ctx, cmp.Or(s.accountIn, cluster.Namespace), s.account, service.Audience)
	}
	err = do(ctx, target.ID, &blocks.Reader{Source: blocks.FromService(conn, tokens, cluster.Namespace, of.baseID, of.target)})
	return errors.Join(err, conn.Close())
}
