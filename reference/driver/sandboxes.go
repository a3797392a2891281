package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// sandboxes are the sandboxes that have volumes of this driver, by crust-proxy's Admin API.
type sandboxes struct{ socket, driver string }

// answerTime is how long crust-proxy may take to answer, in addition to the time of a freeze.
const answerTime = 5 * time.Second

// freeze asks the sandbox that has a volume to freeze its filesystem for at most limit.
func (s sandboxes) freeze(ctx context.Context, id string, limit time.Duration) (thaw func() error, err error) {
	if s.socket == "" {
		return nil, errors.New("it is not mounted on this node, and without --crust-proxy-socket no sandbox can be asked")
	}
	conn, err := grpc.NewClient("unix:"+pathOf(s.socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	admin := adminv1.NewAdminClient(conn)
	asking, cancel := context.WithTimeout(ctx, limit+answerTime)
	defer cancel()
	volume, err := s.find(asking, admin, id)
	if err == nil {
		_, err = admin.FreezeVolume(asking, &adminv1.FreezeVolumeRequest{Volume: volume, Timeout: durationpb.New(limit)})
	}
	if status.Code(err) == codes.FailedPrecondition {
		err = fmt.Errorf("%w: %w", fsops.ErrFrozen, err)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return func() error {
		// Also if the caller no longer waits.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
		defer cancel()
		_, err := admin.ThawVolume(ctx, &adminv1.ThawVolumeRequest{Volume: volume})
		return errors.Join(err, conn.Close())
	}, nil
}

// find returns crust-proxy's id of the volume, at the target where it may be written to.
func (s sandboxes) find(ctx context.Context, admin adminv1.AdminClient, id string) (string, error) {
	for token := ""; ; {
		page, err := admin.ListVolumes(ctx, &adminv1.ListVolumesRequest{Driver: s.driver, PageToken: token})
		if err != nil {
			return "", err
		}
		for _, v := range page.GetVolumes() {
			if v.GetVolumeId() == id && !v.GetReadOnly() {
				return v.GetId(), nil
			}
		}
		if token = page.GetNextPageToken(); token == "" {
			return "", fmt.Errorf("no sandbox has it, by crust-proxy at %s", s.socket)
		}
	}
}
