/* Ping-pong and all-reduce under SMPI, or a real MPI: seconds of a call, the slowest rank's.
 *   smpicc -O2 calibration.c -o calibration && smpirun -platform FILE … ./calibration 8 65536 …
 * Prints a line "operation bytes seconds" each; rounds of at least LEAST_S or one call. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define LEAST_S 0.05

static float *sent, *received;

static void ping_pong(int bytes, int rank, int ranks) {
  int last = ranks - 1;
  if (rank == 0) {
    MPI_Send(sent, bytes, MPI_BYTE, last, 0, MPI_COMM_WORLD);
    MPI_Recv(received, bytes, MPI_BYTE, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else if (rank == last) {
    MPI_Recv(received, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Send(sent, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
  }
}

static void all_reduce(int bytes, int rank, int ranks) {
  (void)rank, (void)ranks;
  MPI_Allreduce(sent, received, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static double timed(void (*call)(int, int, int), int bytes, int rank, int ranks, int calls) {
  double begin, own, slowest;
  MPI_Barrier(MPI_COMM_WORLD);
  begin = MPI_Wtime();
  for (int one = 0; one < calls; one++) call(bytes, rank, ranks);
  own = MPI_Wtime() - begin;
  MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest / calls;
}

int main(int argc, char **argv) {
  int rank, ranks;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (int place = 1; place < argc; place++) {
    int bytes = atoi(argv[place]);
    sent = calloc(bytes + 4, 1), received = calloc(bytes + 4, 1);
    for (int kind = 0; kind < 2; kind++) {
      void (*call)(int, int, int) = kind ? all_reduce : ping_pong;
      double one = timed(call, bytes, rank, ranks, 2), best = 1e9;
      int calls = one * 2 < LEAST_S ? (int)(LEAST_S / (one > 1e-7 ? one : 1e-7)) : 1;
      if (calls > 2000) calls = 2000;
      for (int round = 0; round < 3; round++) {
        double now = timed(call, bytes, rank, ranks, calls);
        if (now < best) best = now;
      }
      /* One way of a ping-pong. */
      if (rank == 0) printf("%s %d %.9g\n", kind ? "all_reduce" : "ping_pong", bytes, kind ? best : best / 2);
    }
    free(sent), free(received);
  }
  MPI_Finalize();
  return 0;
}
